"""Short runs of tests draw nothing: that takes longer than all else they do.

A test file that needs the drawings says so: ``PICTURES = True``. Runs that are started without forking always
draw.
"""

WITHOUT = "RUNS_WITHOUT_PICTURES"  # an environment variable that forked processes inherit (forks.py)


def leave_out(setattr=setattr):
    """setattr: of ``pytest.MonkeyPatch`` where it is to be undone."""
    from trainer.runs import plots

    setattr(plots, "draw_svgs", lambda *given: {})
    setattr(plots, "draw_png", lambda *given: None)
