"""The page on choosing a method has the numbers of the committed results."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from eval import choosing
from eval.errors import EvalError

PAGE = choosing.ROOT / "docs" / "choosing.md"


def app():
    import typer

    application = typer.Typer()
    application.command()(choosing.main)
    return application


def test_the_table_is_that_of_the_results():
    text = PAGE.read_text(encoding="utf-8")
    assert choosing.inserted(text, choosing.table(PAGE)) == text, "run python -m eval.choosing"


def test_each_number_has_a_source_and_each_recommendation_a_method(tmp_path):
    from hf_tiered_cache import methods

    lines = choosing.table(PAGE).splitlines()[2:]
    assert len(lines) == len(choosing.RECOMMENDATIONS) + len(choosing.CONVERSATIONS)
    for line in lines:
        assert "](../" in line
        assert isinstance(eval(re.findall(r"`(.*?)`", line)[0], vars(methods).copy()), methods.Method)


def test_the_figure_has_a_curve_for_each_method():
    figure = choosing.draw()
    curves = {line.get_label(): line.get_xydata() for axes in figure.axes for line in axes.lines}
    assert set(curves) == {label for label, *_ in choosing._LOOKS.values()}
    assert all(len(points) == 3 for points in curves.values())


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    result = CliRunner().invoke(app(), ["--page", str(page)])
    assert result.exit_code == 2 and "must have" in result.output
    assert page.read_text() == "# A page\n"


def test_a_missing_result_is_refused(monkeypatch):
    recommendation = choosing.Recommendation("a situation", "Exact()", ("real-smollm2-135m",), "exact@0.3")
    monkeypatch.setattr(choosing, "RECOMMENDATIONS", (recommendation,))
    with pytest.raises(EvalError, match=r"real-smollm2-135m have no exact@0\.3"):
        choosing.table(PAGE)
