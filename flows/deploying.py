"""What `rollbook deploy` asks Prefect for: which run, from which config, with which parameters of its flows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.ledger import Ledger
from data.store import Store
from flows import launch, replaying
from flows.config import RunConfig, load
from infra.home import Home


@dataclass(frozen=True)
class Subject:
    """The run that deployments are about: one on record, or one that a TOML file begins."""

    config: RunConfig
    file: Path | None
    overrides: list[str]
    store: str | None
    store_endpoint: str | None

    def check(self, more: int) -> None:
        """Raises what would be wrong with training it from the folder that this process is in."""
        longer = self.config.model_copy(update={"iterations": self.config.iterations + more})
        launch.plan(longer)

    def parameters(self, more: int, approve: bool) -> dict[str, dict[str, Any]]:
        """By the function of the flow."""
        where = {"store": self.store, "store_endpoint": self.store_endpoint}
        config = str(self.file) if self.file else None
        train = {"more": more, "config": config, "overrides": self.overrides or None, "approve": approve, **where}
        return {"continue_training": train, "evaluate_run": where, "rescore_run": where, "prune_run": where}


def subject(target: str, overrides: list[str], store: str | None, endpoint: str | None) -> Subject:
    """`target`: a run's name, or the path of a TOML file. Raises LookupError or ConfigError."""
    if target.endswith(".toml"):
        file = Path(target).resolve()
        place = [f"resources.{k}={v}" for k, v in (("store", store), ("store_endpoint", endpoint)) if v is not None]
        config = load(file, [*overrides, *place])
        return Subject(config, file, overrides, config.resources.store, config.resources.store_endpoint)
    ledger = Ledger(Store(store or Home.find().store_url, endpoint), target)
    return Subject(replaying.recorded_config(ledger, overrides), None, overrides, store, endpoint)
