"""A worker that needs no GPU, and crashes, hangs or talks nonsense where its plan says so: argv is GPU and plan."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

gpu, plan = json.loads(sys.argv[1]), json.loads(sys.argv[2])
path = Path(sys.argv[sys.argv.index("--connect") + 1])
pipe = path.open("wb", buffering=0)
job = json.loads(path.with_name("job.json").read_text())
with Path(plan["log"]).open("a") as log:
    log.write(json.dumps(job) + "\n")


def send(message):
    pipe.write((json.dumps(message) + "\n").encode())


def act(what):
    print("about to", what, file=sys.stderr, flush=True)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        sys.exit(7)
    if what == "hang":
        time.sleep(600)
    if what == "garbage":
        pipe.write(b"\x00\xff not json\n")
        time.sleep(600)
    if what == "fatal":
        send({"type": "fatal", "reason": "CUDA_ERROR_ILLEGAL_ADDRESS"})
        sys.exit(3)
    if what == "bad_row":
        send({"type": "row", "cell": 1, "row": {"name": 5}})
        time.sleep(600)
    if what == "unknown":
        send({"type": "dance"})
        time.sleep(600)
    if what == "missing":
        send({"type": "missing", "what": "sdpa in a CUDA graph", "reason": "not permitted when stream is capturing"})
    if what == "orphan":  # dies, while a process that it started lives on and holds the pipe open
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(pipe.fileno(),))
        os._exit(5)


if plan.get("refuse"):
    send({"type": "refused", "error": plan["refuse"], "message": "wanted a GPU, got none"})
    sys.exit(1)
if plan.get("start"):
    act(plan["start"])
send({"type": "hello", "gpu": gpu, "software": {"python": "3"}})
series = {
    "regime": "burst",
    "cache": "hot",
    "calls": 1,
    "time_us": plan.get("time_us", [1.0, 1.1]),
    "sm_clock_mhz": [900.0, 901.0],
    "call_clock_mhz": [800.0, 801.0],
}
verdict = {
    "passed": True,
    "reason": "",
    "max_abs_error": 0.0,
    "max_abs_limit": 1.0,
    "rms_error": 0.0,
    "rms_limit": 1.0,
    "lse_error": None,
    "lse_limit": None,
}
for cell in job["cells"]:
    send({"type": "step", "cell": cell["index"], "name": "", "what": "make inputs"})
    if "inputs" in plan:
        act(plan["inputs"])
    for name in cell["pending"]:
        send({"type": "step", "cell": cell["index"], "name": name, "what": "check"})
        if name in plan:
            act(plan[name])
    for name in cell["pending"]:
        if name in plan.get("forget", []):
            continue
        row = {"status": "ok", "reason": "", "verdict": verdict}
        if cell["problem"] is None:
            row = {
                "status": "ok",
                "reason": "",
                "name": name,
                "unit": "us",
                "value": 1.0,
                "how": "fake",
                "samples": series,
            }
        elif "plan" in job:
            one = job["implementations"][name]
            cubin = plan.get("cubin") and {**plan["cubin"], "parameters": one["params"]}
            row.update(samples=[series], cubin=cubin, verdict=verdict if one["judged"] else None)
            if one["kind"] == "peer":
                row.update(choice="", layout="bshd", lse=None)
        if name in plan.get("refused", []):
            row = {"status": plan["refused"][name][0], "reason": plan["refused"][name][1], "verdict": None}
        send({"type": "row", "cell": cell["index"], "name": name, "row": row})
send({"type": "done"})
