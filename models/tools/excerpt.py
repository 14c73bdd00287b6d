"""How much of a long text a model is shown: beginning and end."""

END = 1 / 3  # of what stays; the last line of an error says what it was


def excerpt(text: str, limit: int) -> str:
    """The text, cut in the middle to `limit` characters and a line that says how many are left out."""
    if len(text) <= limit:
        return text
    tail = int(limit * END)
    return f"{text[: limit - tail]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"
