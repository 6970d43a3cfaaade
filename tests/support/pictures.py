"""Reads the figures off a picture of scaling."""

import xml.etree.ElementTree as ElementTree

from rollstream.pipeline.run.scale_drawing import LEFT, PANEL_HEIGHT, RIGHT, WIDTH

_SVG = "{http://www.w3.org/2000/svg}"


def shown_lines(picture: str) -> dict[str, list[tuple[float, float]]]:
    """Return times and values of each line of a picture, by its name: places within its panel, on the panel's axes."""
    lines = {}
    for panel in ElementTree.fromstring(picture).iter(f"{_SVG}g"):
        top, end_s, y = (float(panel.attrib[f"data-{name}"]) for name in ("top", "end", "y"))
        for line in panel.iter(f"{_SVG}polyline"):
            places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
            lines[line.attrib["data-name"]] = [
                (
                    round((left - LEFT) / (WIDTH - LEFT - RIGHT) * end_s, 2),
                    (y + PANEL_HEIGHT - down) / PANEL_HEIGHT * top,
                )
                for left, down in places
            ]
    return lines
