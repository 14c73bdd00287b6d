"""Reading ahead over a run's iterations: quicker, and otherwise as if each was asked for alone."""

import pickle
from collections.abc import Callable

from data.config import ModelConfig
from data.ledger import Fork, Ledger, Request
from data.store import Store
from tests.data.places import locally_and_on_s3, on_s3, vandalise


@locally_and_on_s3
def test_walk_reads_ahead_what_is_there_and_no_more(ledger: Ledger, request_of: Callable[..., Request]) -> None:
    """70 iterations on record of 200 asked for: each is found as it is, those after them are not there."""
    made = [
        ledger.writer(ledger.at(k, "generate"), request_of(seed=k)).commit(content_digest=str(k)) for k in range(70)
    ]
    seen = [ledger.find(ledger.at(k, "generate")) for k in ledger.walk(range(200))]
    assert seen == [*made, *[None] * 130]
    late = ledger.writer(ledger.at(150, "generate"), request_of()).commit(content_digest="late")
    assert ledger.find(ledger.at(150, "generate")) == late


@on_s3
def test_what_was_read_ahead_is_not_kept(ledger: Ledger, request_of: Callable[..., Request], store: Store) -> None:
    """The walk over, the store is asked again; and nothing of it travels to a worker."""
    made = ledger.writer(ledger.at(0, "generate"), request_of()).commit(content_digest="x")
    walk = ledger.walk(range(3))
    next(walk)
    assert pickle.loads(pickle.dumps(ledger)) == ledger and not pickle.loads(pickle.dumps(ledger))._ahead
    vandalise(store, made.uri, None)
    assert ledger.find(ledger.at(0, "generate")) == made  # read before
    assert ledger.find(ledger.at(0, "generate")) is None
    ledger.writer(ledger.at(1, "generate"), request_of()).commit(content_digest="y")
    assert list(walk) == [1, 2] and ledger.find(ledger.at(1, "generate")) is not None


@on_s3
def test_a_fork_reads_ahead_from_where_it_leaves_its_parent(
    ledger: Ledger, request_of: Callable[..., Request], store: Store
) -> None:
    """The iteration before the fork is in the parent's folder only."""
    for k in range(3):
        ledger.writer(ledger.at(k, "generate"), request_of(seed=k)).commit(content_digest=str(k))
    fork = Ledger(store, "fork")
    fork.open_or_create(ModelConfig(), Fork(run="sort", iteration=2, step="score"))
    walk = fork.walk(range(2, 4))
    next(walk)
    assert list(fork._ahead) == ["sort/000002/generate/manifest.json"]
