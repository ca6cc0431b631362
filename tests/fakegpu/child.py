"""The process with the fake GPU: `python -m fakegpu.child GUARD`, calls as JSON on its input, answers on its output."""

import ctypes
import json
import sys
import traceback


def main():
    # Before torch: its engine takes the first function that says which accelerator there is.
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    from fakegpu import steps
    from fakegpu.cuda import answer_for_one_gpu

    answer_for_one_gpu()
    answers = {}
    for name, (function, keywords) in json.load(sys.stdin).items():
        try:
            answers[name] = getattr(steps, function)(**keywords)
        except Exception:  # noqa: BLE001  # it fails the test that asked for this answer, and no other
            answers[name] = {"error": traceback.format_exc()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
