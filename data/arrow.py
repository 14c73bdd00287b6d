"""Arrow's compute functions. pyarrow makes them when it is imported, so a type checker does not see that they exist."""

from typing import Any

import pyarrow.compute

pc: Any = pyarrow.compute
