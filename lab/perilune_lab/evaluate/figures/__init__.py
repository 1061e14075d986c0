"""The ten figures: each a function of the context, drawn with its data, in a file of its own.

FIGURES[name].make(context, folder, name)  →  name.svg, name.png, name.json
"""

from collections.abc import Mapping

from perilune_lab.evaluate.figures.f1 import F1
from perilune_lab.evaluate.figures.f4 import F4
from perilune_lab.evaluate.figures.f6 import F6
from perilune_lab.evaluate.figures.f7 import F7
from perilune_lab.evaluate.figures.style import Context, Figure

FIGURES: Mapping[str, Figure] = {"f1": F1, "f4": F4, "f6": F6, "f7": F7}

__all__ = ["FIGURES", "Context", "Figure"]
