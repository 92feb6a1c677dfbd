"""Counts of each program here its lines, its words, and the names of libraries in it that its author has to know."""

import ast
import builtins
import pathlib
import re

PROGRAMS = {
    "Keras `fit`": ["keras_fit.py"],
    "`tfdist.fit`": ["tfdist_fit.py"],
    "tfdist, gin": ["tfdist_gin.py", "tfdist_gin.gin"],
    "accelerate": ["accelerate_loop.py"],
    "Lightning CLI": ["lightning_cli.py", "lightning_cli.yaml"],
}


def list_names(text, suffix):
    if suffix != ".py":
        return set(re.findall(r"[a-z_]+(?=:| =|\.\w+ =)", text))
    nodes, known = list(ast.walk(ast.parse(text))), set(dir(builtins))
    known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)} | {"self", "astype"}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    used |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    used |= {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.args.args[:1] == ["self"]}
    return used - known


for tool, files in PROGRAMS.items():
    texts = {name: (pathlib.Path(__file__).parent / name).read_text() for name in files}
    lines = sum(bool(line.strip()) for text in texts.values() for line in text.splitlines())
    words = sum(len(re.findall(r"\w+", text)) for text in texts.values())
    names = set().union(*(list_names(text, pathlib.Path(name).suffix) for name, text in texts.items()))
    print(f"| {tool} | {lines} | {words} | {len(names)} |")
