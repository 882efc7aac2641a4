"""The named shapes, and which of them a problem is most like."""

from __future__ import annotations

import pytest
from cases import every

from ece408_op.bench import shapes
from ece408_op.course import course_terms
from ece408_op.errors import InvalidProblem
from ece408_op.problem import ConvProblem


@every(name=shapes.SHAPES)
def test_a_named_shape_is_nearest_to_itself_at_any_batch(name):
    assert shapes.nearest(shapes.find(name, batch=3)) == name


@every(
    case=[
        ("b1,c1,h53,w47,m9,k5", "sp19_1"),
        ("b1,c3,h41,w35,m7,k3", "sp19_1"),
        ("b1,c5,h29,w31,m20,k5", "sp18_2"),
        ("b1,c64,h14,w14,m64,k3", "k7_2"),
    ]
)
def test_sums_filters_and_pixels_decide_what_is_nearest(case):
    text, name = case
    assert shapes.nearest(ConvProblem.parse(text)) == name


def test_a_name_that_is_none():
    with pytest.raises(InvalidProblem, match="'fa19_3' is neither a shape's name"):
        shapes.find("fa19_3")


@every(term=course_terms.TERMS.values())
def test_a_terms_layers_are_those_of_its_network(term):
    first, *second = shapes.of_term(term.name).values()
    found = [(each.height, each.filters) for each in (first, *second)]
    halved = [((term.image_size - 4) // 2, each) for each in term.filters[1:]]
    assert found == [(term.image_size, term.filters[0]), *halved]
    assert shapes.called(shapes.find("fa20_2", 3)) == "fa20_2"
