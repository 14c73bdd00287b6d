"""Long texts cut so that all of them together fit a size: what is cut is counted, beginning and end stay."""

from collections.abc import Sequence

import numpy as np

END = 1 / 3  # of what stays of a text that is cut; an answer tends to stand there
Cut = tuple[str, int, str]  # beginning, how many characters are left out, end


def _costs() -> np.ndarray:
    """[256] uint8: the most bytes that a byte of UTF-8 takes in a page's JSON, where some characters are escapes."""
    costs = np.ones(256, np.uint8)
    costs[:0x20] = costs[list(b"<>&")] = 6
    costs[list(b'"\\')] = 2
    costs[[0xE2, 0xED]] = 4  # the first of three, of U+2028 and U+2029, and of a lone surrogate
    return costs


COSTS = _costs()


def cut(texts: Sequence[str], budget: int) -> list[str | Cut]:
    """The same texts within `budget` bytes, the longest cut first."""
    sizes = np.array([int(COSTS[_bytes(text)].sum(dtype=np.int64)) for text in texts], np.int64)
    limit = share(sizes, budget)
    return [text if size <= limit else _ends(text, limit) for text, size in zip(texts, sizes, strict=True)]


def share(sizes: np.ndarray, budget: int) -> int:
    """The size that none may pass, so that all together stay within the budget.

    sizes: [texts] int64, what each would take whole.
    """
    order = np.sort(sizes)
    before = np.cumsum(order) - order
    levels = (budget - before) // np.arange(len(order), 0, -1)  # if this one and all longer ones are cut
    long = np.flatnonzero(order > levels)
    return max(int(levels[long[0]]), 0) if len(long) else int(order.max(initial=0))


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _ends(text: str, limit: int) -> Cut:
    data = _bytes(text)
    total = np.cumsum(COSTS[data], dtype=np.int64)
    tail = int(limit * END)
    starts = np.append((data & 0xC0) != 0x80, True)  # places between two characters
    stop = int(np.searchsorted(total, limit - tail, "right"))
    stop = int(np.flatnonzero(starts[: stop + 1])[-1])
    start = int(np.searchsorted(total, total[-1] - tail, "left")) + 1
    start += int(np.argmax(starts[start:]))
    head, end = (part.tobytes().decode("utf-8", "surrogatepass") for part in (data[:stop], data[start:]))
    return head, len(text) - len(head) - len(end), end
