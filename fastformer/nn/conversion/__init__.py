"""An existing model on our modules, in place and back: `convert` and `revert`.

Our drop-in classes add no state, so a module becomes ours by a change of its class: parameters, hooks, ties, the
optimiser's references and the names in the state dict stay what they are.
"""

from fastformer.nn.conversion.in_place import convert, revert
from fastformer.nn.conversion.report import Conversion, Entry

__all__ = ["Conversion", "Entry", "convert", "revert"]
