"""The ten figures, each in a module of its own. A figure is drawn from the context and written with its data:

FIGURES[name].make(context, folder, name)  →  name.svg, name.png, name.json
"""

from collections.abc import Mapping

from perilune_research.evaluate.figures.f1 import F1
from perilune_research.evaluate.figures.f2 import F2
from perilune_research.evaluate.figures.f3 import F3
from perilune_research.evaluate.figures.f4 import F4
from perilune_research.evaluate.figures.f5 import F5
from perilune_research.evaluate.figures.f6 import F6
from perilune_research.evaluate.figures.f7 import F7
from perilune_research.evaluate.figures.f8 import F8
from perilune_research.evaluate.figures.f9 import F9
from perilune_research.evaluate.figures.f10 import F10
from perilune_research.evaluate.figures.style import Context, Figure

FIGURES: Mapping[str, Figure] = {
    "f1": F1,
    "f2": F2,
    "f3": F3,
    "f4": F4,
    "f5": F5,
    "f6": F6,
    "f7": F7,
    "f8": F8,
    "f9": F9,
    "f10": F10,
}

__all__ = ["FIGURES", "Context", "Figure"]
