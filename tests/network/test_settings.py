"""Small networks of every kind with every setting that affects networks."""

import pytest
from gpu_networks import NETWORKS, error, small

from ece408_op import settings
from ece408_op.errors import NotEnoughMemory

# Allowed error of these precisions, relative to the largest output.
BELOW = {"strict": 3e-6, "float32": 3e-6, "tf32": 1e-3, "float16": 5e-3}
SETTINGS = [
    *({"precision": precision} for precision in BELOW if precision != "strict"),
    *({"gpu_memory": size} for size in ("48K", "200K")),
    *({"threads": count} for count in (1, 3)),
    {"isa": "baseline"},
]
# Settings with separate kernels, which take seconds to compile for each network.
COSTLY = [{"precision": "strict"}, {"emulation": "checked"}, {"kernel": "1_naive"}]
FEW = ("mobilenet",)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        *((options, tuple(NETWORKS)) for options in SETTINGS),
        *((options, FEW) for options in COSTLY),
        *(pytest.param(options, tuple(NETWORKS), marks=pytest.mark.slow) for options in COSTLY),
    ],
    ids=lambda each: "-".join(map(str, *each.items()) if isinstance(each, dict) else each),
)
def test_every_setting(mx, options, names):
    for name in names:
        case = small(mx, name)
        expected = case.expected()
        with settings.override(**options):
            network = case.network()
            for found, its in zip(case.run(network), expected):
                below = BELOW[settings.precision()]
                assert error(found, its) < below, name
            network.close()


@pytest.mark.usefixtures("emulated")
def test_too_little_memory_is_told(mx):
    case = small(mx, "resnet")
    with (
        settings.override(gpu_memory="2K"),
        pytest.raises(
            NotEnoughMemory, match="bytes on the GPU for one image, and 2048 may be used"
        ),
    ):
        case.run(case.network())
