"""HTML on stdin, its text on stdout: a program, since pages are made that keep a parser busy for minutes."""

import logging
import resource
import sys

import trafilatura

CPU_S, MEMORY = 60, 4 << 30  # should nobody be left to end it


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it complains of each page without a text
    html = sys.stdin.buffer.read().decode()
    # A part of a page is taken for none without the frame.
    text = trafilatura.extract(html, include_comments=False) or trafilatura.html2txt(
        f"<html><body>{html}</body></html>"
    )
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
