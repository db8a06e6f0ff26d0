"""`jaxserve` with the fake model, as a process of its own, for tests that send signals.

Environment: FAKE_STEP_S, seconds per step; FAKE_LOG, a file that gets one line per submitted
prompt, so that a test sees what was computed even by a process that was killed.
"""

import os
import sys
from types import SimpleNamespace

import jaxserve.loading.source
from jaxserve.cli import main
from tests.cli.fakes import FakeLLM


class SlowLLM(FakeLLM):
    def __init__(self, *, config):
        super().__init__(config=config)
        self.engine.step_s = float(os.environ["FAKE_STEP_S"])
        submit = self.engine.submit

        def logged_submit(*args, **kwargs):
            request_id = submit(*args, **kwargs)
            with open(os.environ["FAKE_LOG"], "a") as log:
                log.write(f"{self.engine.submitted[-1]}\n")
            return request_id

        self.engine.submit = logged_submit


sys.modules["jaxserve.llm"] = SimpleNamespace(LLM=SlowLLM)
jaxserve.loading.source.locate = lambda *_: (None, None, "fake")
main(prog_name="jaxserve")
