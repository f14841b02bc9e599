"""The benchmark's worker: what an arm switches and no order does."""

from __future__ import annotations

from workers.record import Record
from workers.vllm.host_worker import HostWorker


class SpeedWorker(HostWorker):
    """`HostWorker` whose draft depth and record can be switched while it serves."""

    def choose_depth(self, chosen: bool) -> None:
        self._speculation.admission.draft_depth = chosen

    def stop_recording(self) -> None:
        self._speculation.record = Record(0)
        self.specfleet = self.specfleet.model_copy(update={"record": 0})
        if self._capture is not None:
            self._capture.keep_details = False
