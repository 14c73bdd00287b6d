"""From a run's page on a real MLflow server to one trajectory, in a real browser."""

import json
from typing import Any

import pytest

from tests.browser import chromium
from tests.scheduling import serving

LIST = "#/experiments/1/runs?workflowType=machine_learning"


@pytest.mark.slow
def test_from_the_page_of_a_run_to_a_trajectory(finished: tuple[Any, str]) -> None:
    """The report is inside MLflow's frame, which may run scripts and nothing else."""
    desk = finished[0]
    listed = desk.json("show", "small", "--iteration", "2")["trajectories"]
    best = max(listed, key=lambda t: t["reward"])
    with serving(desk), chromium() as (tab, seen):
        servers = json.loads((desk.folder / ".rollbook/servers.json").read_text())
        tab.goto(f"{servers['mlflow_url']}/{LIST}")
        tab.get_by_role("link", name="small", exact=True).first.click()
        tab.get_by_role("link", name="small/2").first.click()
        tab.get_by_text("Artifacts", exact=True).first.click()
        tab.get_by_text("report.html").first.click()
        frame = tab.frame_locator("iframe[sandbox='allow-scripts']")
        frame.locator(".tabulator-row.chosen").wait_for()
        assert frame.locator("#title").inner_text() == "small, iteration 2"
        assert frame.locator("#count").inner_text() == f"{len(listed)} trajectories"
        frame.locator("#search").fill(best["trajectory_id"])
        frame.locator(".tabulator-row").click()
        assert frame.locator("#one h2").inner_text() == best["trajectory_id"]
        assert f"{best['reward']:.3f}" in frame.locator(".facts").first.inner_text()
        assert frame.locator(".turn h3 b").all_inner_texts() == ["user", "assistant"]
        assert "Sort: " in frame.locator(".turn").first.inner_text()
        frame.get_by_role("button", name="advantage").click()
        assert frame.locator(".turn.generated .strip span").count() == len(best["answer"]) + 1  # digits, end of turn
        assert not [c for c in seen.complaints if "Security Policy" in c or "TypeError" in c]
        assert all(url.startswith((servers["mlflow_url"], "blob:")) for url in seen.requests)
