"""The named shapes."""

import pytest
from cases import every

from ece408_op.bench import shapes
from ece408_op.course import course_terms
from ece408_op.errors import InvalidProblem


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
