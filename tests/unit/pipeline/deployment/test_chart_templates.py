"""Templates of a chart hold the scalars that helm fills in, and lines around what may be left out."""

from typing import Any

from rollstream.pipeline.deployment.chart.templates import Enclosed, Raw, Template


def test_a_template_has_scalars_without_quotes_and_lines_around_what_may_be_left_out() -> None:
    table: dict[str, Any] = {"aa": Raw("{{ x }}"), "bb": Enclosed("{{- if y }}", {"cc": 1}, "{{- end }}")}
    table["dd"] = [{"ee": 1}, Enclosed("{{- range z }}", [Raw("{{ . }}"), {"ff": [2], "gg": {}}], "{{- end }}")]
    assert Template("", [table]).text().splitlines()[3:] == [
        "aa: {{ x }}",
        "{{- if y }}",
        "bb:",
        "  cc: 1",
        "{{- end }}",
        "dd:",
        "- ee: 1",
        "{{- range z }}",
        "- {{ . }}",
        "- ff: [2]",
        "  gg: {}",
        "{{- end }}",
    ]
