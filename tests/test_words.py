"""One word for one idea: sources and documents keep to the field's, not to those of before."""

import re
import subprocess

import pytest
from places import ROOT

# Each was replaced by the word behind it.
REPLACED = {
    r"(pixels?|filters?|channels?)[_ ]as[_ ]lanes": "conv_fwd_ow, conv_fwd_oc, conv_bwd_w_ic",
    r"weight_sums|\bsingle_tap\b": "conv_bwd_w_dot, conv_1x1",
    r"short_sums": "pointwise_simt",
    r"\b(direct|mma)_gemm": "implicit_gemm_fused, implicit_gemm_sm80",
    r"(halves|thirds)\.cuh": "split_fp16x2, split_bf16x3",
    r"\bDeep(End|Asked)\b|kDeepSoon": "OcConv, Epilogue, kPrefetchDistance",
    r"rarely_used|\blent_memory\b|ordered_op\b|before_mxnet": "lazy_imports, pinned_arrays, ...",
    r"\bteams?\b": "threads, workers",
    r"\bpieces?\b": "chunks, segments",
    r"\bask(s|ed|ing)? for\b": "prefetch, request",
    r"\bso many\b|\bwhat there is\b|\bas they lie\b": "a number, a name, an address",
    r'^"""What ': "a noun",
}
NOT_OURS = ("docs/results/", "CHANGELOG.md", "tests/test_words.py")
ENDINGS = (".py", ".sh", ".h", ".cc", ".cpp", ".cu", ".cuh", ".md", ".toml", "Makefile")


def test_words():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    found = [
        f"{path}: {match[0]!r}, better: {better}"
        for path in listed.stdout.splitlines()
        if path.endswith(ENDINGS) and not path.startswith(NOT_OURS) and (ROOT / path).is_file()
        for pattern, better in REPLACED.items()
        for match in re.finditer(pattern, (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert not found, "\n".join(found)
