"""Runs inside the sandbox: evaluates each expression in a child with limits of its own. Standard library only.

Reads {"target", "cpu_s", "memory_bytes", "expressions"} and prints one JSON line a sample. One child judges them all;
where it dies, the sample it was at has failed and another child goes on with the next.
"""

import ast
import json
import os
import resource
import signal
import sys

CHARACTERS = frozenset("0123456789+-*/%() ")
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


def judge(text: str | None, target: int) -> dict[str, object]:
    """What one expression is worth; raises whatever evaluating it raises."""
    if text is None:
        return {"outcome": "no end token"}
    if not text or not CHARACTERS.issuperset(text):
        return {"outcome": "not an expression"}
    tree = ast.parse(text.lstrip(" "), mode="eval")  # as `eval` does: a leading space is no indentation
    operators = 0
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            return {"outcome": "not an expression"}
        if isinstance(node, ast.Constant) and not (type(node.value) is int and 0 <= node.value <= 9):
            return {"outcome": "a literal has more than one digit"}
        operators += isinstance(node, ast.BinOp)
    if not operators:
        return {"outcome": "no operator"}
    value = eval(compile(tree, "expression", "eval"), {"__builtins__": {}})
    correct = not isinstance(value, complex) and value == target
    small = isinstance(value, int) and abs(value) < 10**9
    return {"outcome": "evaluated", "correct": correct, "value": value if small else str(type(value).__name__)}


def child(write_fd: int, request: dict, first: int) -> None:
    """Judge from `first` on; a line goes out before the next sample begins."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    for sample in range(first, len(request["expressions"])):
        signal.setitimer(signal.ITIMER_REAL, request["cpu_s"])  # the default action ends the child
        try:
            verdict = judge(request["expressions"][sample], request["target"])
        except (ArithmeticError, SyntaxError, ValueError, MemoryError, RecursionError, TypeError) as error:
            verdict = {"outcome": type(error).__name__}
        os.write(write_fd, (json.dumps({"sample": sample, **verdict}) + "\n").encode())


def main() -> None:
    request = json.load(sys.stdin)
    first = 0
    while first < len(request["expressions"]):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            try:
                child(write_fd, request, first)
            finally:
                os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as lines:
            for line in lines:
                sys.stdout.write(line.decode())
                first = json.loads(line)["sample"] + 1
        os.waitpid(pid, 0)
        if first < len(request["expressions"]):
            print(json.dumps({"sample": first, "outcome": "killed"}))
            first += 1


if __name__ == "__main__":
    main()
