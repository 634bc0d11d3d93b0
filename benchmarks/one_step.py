"""A step of train_ppo.py on its own: its real loop, with a run and records that the caller has made."""

from contextlib import nullcontext
from unittest.mock import patch

from trainer import train_ppo


class OneStep:
    """In the place of ``Session``: one step of a run, with these records; what it logs."""

    def __init__(self, run, step, records):
        self.run, self.world = run, run.world
        self.step, self.given = step, records

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def steps(self):
        yield self.step

    def records(self, step):
        return self.given

    def nothing_learned(self):
        return nullcontext()

    def conclude(self, metrics, rows):
        self.metrics, self.rows = metrics, rows


def take_step(run, step, records, before_learning=lambda batch: None):
    """A step of ``main`` -> (metrics, the new batch). before_learning: gets the batch once it has scores."""
    session = OneStep(run, step, records)
    evaluate_tokens = train_ppo.evaluate_tokens

    def seen(args, step, batch, *more):
        session.batch = batch
        before_learning(batch)
        return evaluate_tokens(args, step, batch, *more)

    with (
        patch.object(train_ppo, "parse_args"),
        patch.object(train_ppo, "open_session", lambda build, args: session),
        patch.object(train_ppo, "evaluate_tokens", seen),
    ):
        train_ppo.main()
    return session.metrics, session.batch
