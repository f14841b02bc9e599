"""Five kinds of text that differ in how predictable they are.

A workload is a list of documents, cut into a training part and a held-out part that share no
document. What is generated is drawn from a seed, what is collected is ordered by a hash of its
name: the same sources make the same corpus, byte for byte.
"""

from workers.reference.workloads.base import Generated, Workload
from workers.reference.workloads.chat import chat
from workers.reference.workloads.code import Code
from workers.reference.workloads.prose import Prose
from workers.reference.workloads.structured import structured
from workers.reference.workloads.word_problems import word_problem

__all__ = ["WORKLOADS", "Workload"]

WORKLOADS: dict[str, Workload] = {
    "code": Code(),
    "math": Generated("math", word_problem, documents=24_000),
    "prose": Prose(),
    "chat": Generated("chat", chat, documents=12_000),
    "structured": Generated("structured", structured, documents=6_000),
}
