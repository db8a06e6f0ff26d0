"""One measured start: `python -m jaxserve.cli.startup_process JOB`, figures to stdout as JSON.

Does what `jaxserve generate` does until its first token, in the same order; `jaxserve bench
startup` starts it.
"""

from __future__ import annotations

import json
import resource
import sys
import time


def main(job: str) -> None:
    """Start an engine and wait for one token.

    Args:
        job: JSON object with "config" (fields of `EngineConfig`), "prompt", and "begun", the
            monotonic clock when the process was asked for.
    """
    import jaxserve.cli.generate
    import jaxserve.llm  # noqa: F401
    from jaxserve.config import EngineConfig
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.startup import build

    asked = json.loads(job)
    imported = time.monotonic()
    built = build(EngineConfig.from_mapping(asked["config"]))
    ready = time.monotonic()
    engine = built.engine
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.submit(built.tokenizer.encode(asked["prompt"]), params)
    while not engine.step():
        pass
    done = time.monotonic()
    seconds = {"imports": imported - asked["begun"], **built.seconds, "first_token": done - ready}
    kilobyte = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte
    totals = {"total": done - asked["begun"], "processor": time.process_time()}
    print(json.dumps({**seconds, **totals, "peak_rss_bytes": peak}))
    engine.runner.close()


if __name__ == "__main__":
    main(sys.argv[1])
