"""SGLang behind the engine contract: in this process, as servers of our own, or at given addresses."""
