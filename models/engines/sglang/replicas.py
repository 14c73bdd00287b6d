"""Several SGLangs that serve one policy: work shared by tokens, the dead replaced, no trajectory answered twice."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from data.config import EngineConfig
from models.engines.sglang.arguments import server_arguments
from models.engines.sglang.backend import Answer, Asked, Backend, BackendLost
from models.engines.sglang.embedded import Embedded

log = logging.getLogger("rollbook")
ATTEMPTS = 3  # of a call, each on replicas that live


class Replicas:
    """Started with the first weights; each is made again, with the present weights, when it was lost."""

    def __init__(self, config: EngineConfig, device: str, threads: int) -> None:
        self._config, self._device, self._threads = config, device, threads
        self._backend: Backend | None = None
        self._revive: Callable[[], Backend] | None = None

    def load(self, folder: Path, tag: str, in_place: bool, prove: Callable[[Backend], None]) -> None:
        """Weights to every replica; those that cannot take them in place, or are lost, are started with them."""

        def start() -> Backend:
            arguments = server_arguments(self._config, folder, self._device, tag, self._threads)
            backend = Embedded(arguments, self._device)
            try:
                prove(backend)
            except BaseException:
                backend.close()
                raise
            return backend

        self._revive = start
        if self._backend is not None and in_place:
            try:
                self._backend.load_folder(folder, tag)
                return prove(self._backend)
            except BackendLost as lost:
                log.warning("%s; it is started again", lost)
        self.close()
        self._backend = start()

    def generate(self, asked: Sequence[Asked]) -> list[Answer]:
        """One answer each, in order. Raises BackendLost if replicas die again and again."""
        answers: dict[int, Answer] = {}
        for attempt in range(ATTEMPTS):
            places = [place for place in range(len(asked)) if place not in answers]
            if not places:
                break
            backend = self._living()
            again = [Asked(f"{asked[p].name}.{attempt}", asked[p].token_ids, asked[p].sampling) for p in places]
            try:
                backend.generate(
                    again,
                    lambda i, answer, places=places: answers.setdefault(places[i], answer),
                    self._config.timeout_s,
                )
            except BackendLost as lost:
                self.close()
                if attempt + 1 == ATTEMPTS:
                    raise
                log.warning("%s; %d of %d answers are asked for again", lost, len(asked) - len(answers), len(asked))
        return [answers[place] for place in range(len(asked))]

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _living(self) -> Backend:
        if self._backend is None:
            if self._revive is None:
                raise BackendLost("no SGLang has been started; call update_weights first")
            self._backend = self._revive()
        return self._backend
