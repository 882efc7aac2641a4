import json

from ece408_op.files.records import to_json

DOCUMENT = {
    "date": "today",
    "machine": {"cpu": "C", "gpus": ["G", "G"]},
    "rows": [{"name": "a", "ms": {"ours": {"median": 1.5, "n": 2}}}, {"name": "b", "ms": {}}],
    "networks": [{"name": "n", "layers": [{"layer": "c", "ms": {"ours": {"median": 1}}}]}],
    "nothing": [],
}


def test_a_record_is_a_line():
    text = to_json(DOCUMENT)
    assert json.loads(text) == DOCUMENT
    assert text.splitlines()[1:7] == [
        ' "date": "today",',
        ' "machine": {"cpu": "C", "gpus": ["G", "G"]},',
        ' "rows": [',
        '  {"name": "a", "ms": {"ours": {"median": 1.5, "n": 2}}},',
        '  {"name": "b", "ms": {}}',
        " ],",
    ]
    assert '    {"layer": "c", "ms": {"ours": {"median": 1}}}' in text.splitlines()
