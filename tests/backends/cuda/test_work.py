"""Cost of a call before its kernel starts."""

from types import SimpleNamespace

from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernels import copied_images
from ece408_op.problem import ConvProblem

GPU = SimpleNamespace(name="NVIDIA H200", capability=(9, 0), driver=13000)
PROBLEM = ConvProblem.parse("b1000,c1,h70,w70,m12,k5")


def test_a_call_again_looks_for_no_layout(monkeypatch):
    asked = work.forward(PROBLEM, 1, 2, None, 3, False)
    first = asked.plans(GPU, PROBLEM.batch)

    def never(*arguments):
        raise AssertionError("a layout was looked for")

    for name, family in vars(copied_images).items():
        if isinstance(family, type) and "layouts" in vars(family):
            monkeypatch.setattr(family, "layouts", never)
            monkeypatch.setattr(family, "why_not", never)
            assert name
    assert asked.plans(GPU, PROBLEM.batch) == first
