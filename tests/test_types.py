"""The package's types, as mypy sees them from a user's project."""

import subprocess
import sys
import venv

from places import ROOT

SCRIPT = """
import ece408_op
import mxnet as mx

net = mx.gluon.model_zoo.vision.get_model("squeezenet1.0")
net.initialize()
print(ece408_op.swap(net, only=["features*"]))
with ece408_op.op_times() as log:
    net(mx.nd.ones((1, 3, 224, 224))).wait_to_read()
for entry in log:
    milliseconds: float = entry.milliseconds
    print(entry.layer, entry.kernel, milliseconds)
flops: int = ece408_op.ConvProblem.parse("b1,c1,h5,w5,m1,k3").flops
symbol, args, aux = ece408_op.load_checkpoint("net", 0)
speed_up: float = ece408_op.compare(net, net, mx.nd.ones((1, 3, 224, 224))).speed_up
y = ece408_op.Convolution(mx.nd.ones((1, 1, 5, 5)), kernel=(3, 3), num_filter=1)
layer = ece408_op.Conv2D(channels=12, kernel_size=5, activation="relu")
ece408_op.settings.configure(threads=2)
try:
    report: ece408_op.NetComparison = ece408_op.compare(net, net, y)
except ece408_op.errors.Ece408Error as error:
    code: int = error.exit_code
"""
WRONG = SCRIPT + "ece408_op.swap_checkpoint(1, 'zero', out=None)\n"


def _mypy(folder, text):
    """Return the output of mypy --strict for a script with the package installed."""
    environment = folder / "environment"
    if not environment.exists():
        venv.create(environment, symlinks=True)
        site = next((environment / "lib").glob("python3*")) / "site-packages"
        (site / "ece408_op").symlink_to(ROOT / "ece408_op")
    (folder / "script.py").write_text(text)
    (folder / "mypy.ini").write_text("[mypy]\n[mypy-mxnet.*]\nignore_missing_imports = True\n")
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    return subprocess.run([*command, "script.py"], capture_output=True, text=True, cwd=folder)


def test_a_strict_script_has_no_errors_but_those_put_into_it(tmp_path):
    result = _mypy(tmp_path, WRONG)
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 3, result.stdout
    assert all('to "swap_checkpoint" has incompatible type' in line for line in errors), errors
