"""Scalars for TensorBoard, written as the run's other files are: torch's SummaryWriter ends the run when the disk is full."""

import io
import platform
import time

from rl.record.files import Files


class TensorBoard:
    """An event file of its own for each start of the run."""

    def __init__(self, files: Files, first_step: int):
        """first_step: of a run that resumes. TensorBoard hides the rows of earlier starts from there on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._files, self._event = files, Event
        self._name = f"tensorboard/events.out.tfevents.{int(time.time())}.{platform.node()}"
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:
            begins = SessionLog(status=SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=first_step, session_log=begins))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._files.append(self._name, record.getvalue())
