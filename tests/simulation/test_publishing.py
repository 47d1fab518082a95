"""Published names under faults: subscribers hold one version, whatever is killed, stopped, late or doubled."""

from __future__ import annotations

import pytest

from tests.simulation.publishing import PublishingHistory

HISTORIES = 60


@pytest.mark.slow
def test_no_history_of_a_published_name_breaks_a_promise() -> None:
    journals = [PublishingHistory(seed).run() for seed in range(HISTORIES)]
    assert sum(journal.applied for journal in journals) > HISTORIES
    assert sum(journal.killed for journal in journals) > 3
    assert sum(journal.paused for journal in journals) > 3
    assert sum(journal.removed for journal in journals) > 10
    assert sum(journal.left_records for journal in journals) > 3
    assert sum(journal.early for journal in journals) > 10
    assert sum(journal.withdrawn for journal in journals) > 3
    assert sum(len(journal.published) for journal in journals) > HISTORIES
