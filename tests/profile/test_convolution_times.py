"""Op times of MXNet's own convolutions."""

AFTER_A_FAILURE = """
import json, sys
from ece408_op.errors import NoUsableGpu
from ece408_op.operator.loading import load_mxnet
from ece408_op.profile import convolution_times

mx = load_mxnet()
try:
    with convolution_times.told():
        mx.nd.zeros((3,)).wait_to_read()
        mx.nd.waitall()
        raise NoUsableGpu("none")
except NoUsableGpu:
    pass
mx.nd.ones((3,)).wait_to_read()
mx.nd.waitall()
mx.profiler.set_config(filename=sys.argv[1], profile_imperative=True)
mx.profiler.dump(True)
with open(sys.argv[1]) as file:
    print({event["name"] for event in json.load(file)["traceEvents"]} & {"_zeros", "_ones"})
"""


def test_nothing_is_recorded_after_a_failure(run_python, tmp_path):
    # MXNet's profiler records in memory, 17 KiB per call of a small convolution.
    code = AFTER_A_FAILURE.replace("sys.argv[1]", repr(str(tmp_path / "operators.json")))
    result = run_python(code)
    assert (result.stdout, result.stderr) == ("{'_zeros'}\n", "")
