import pytest

from ece408_op import errors


def _all_errors(base=errors.Ece408Error):
    for each in base.__subclasses__():
        yield each
        yield from _all_errors(each)


def test_every_error_has_an_exit_code_of_its_own():
    codes = [error.exit_code for error in _all_errors()]
    assert len(set(codes)) == len(codes)
    # 0 is success, 1 unexpected errors, 2 argparse's, and those from 126 are the shell's.
    assert all(2 < code < 126 for code in codes)


def test_surfaced_raises_the_original_error_in_place_of_mxnets():
    cause = ZeroDivisionError("in a kernel")

    def fail():
        with errors.surfaced():
            errors.remember(cause)
            raise RuntimeError("Check failed")

    with pytest.raises(errors.OperatorFailed, match="ZeroDivisionError: in a kernel") as caught:
        fail()
    assert caught.value.__cause__ is cause


def test_surfaced_raises_even_if_mxnet_says_nothing():
    with pytest.raises(errors.InvalidProblem, match="stays itself"), errors.surfaced():
        errors.remember(errors.InvalidProblem("stays itself"))


def test_surfaced_leaves_other_errors_alone_and_forgets_earlier_failures():
    errors.remember(ValueError("earlier"))
    with pytest.raises(KeyError), errors.surfaced():
        raise KeyError("unrelated")
    assert errors.take_failure() is None


def test_the_first_failure_is_kept():
    errors.remember(ValueError("first"))
    errors.remember(ValueError("second"))
    assert "first" in str(errors.take_failure())


def test_outside_surfaced_a_failure_is_said_once(capfd):
    for text in ("one", "one", "two"):
        errors.remember(errors.InvalidProblem(text))
    assert capfd.readouterr().err == "ece408: error: one\nece408: error: two\n"
    with pytest.raises(errors.InvalidProblem), errors.surfaced():
        errors.remember(errors.InvalidProblem("three"))
    assert capfd.readouterr().err == ""
