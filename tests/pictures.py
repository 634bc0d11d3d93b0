"""Short runs of tests draw no curves.png and write no report.html: that takes longer than all else they do.

A test file that needs them says so: ``PICTURES = True``. Runs that are started without forking always draw.
"""

WITHOUT = "RUNS_WITHOUT_PICTURES"  # an environment variable that forked processes inherit (forks.py)


def leave_out(setattr=setattr):
    """setattr: of ``pytest.MonkeyPatch`` where it is to be undone."""
    from trainer.runs import report

    setattr(report.Report, "write", lambda *args: None)
