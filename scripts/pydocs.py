"""The prose in the documentation that comes with Python: docstrings, and the topics of help()."""

import ast
import inspect
import re
from pathlib import Path

from scripts.corpus import File

WITHOUT_PROSE = ("encodings/", "idlelib/")
TOPICS = "pydoc_data/topics.py"  # one dict: {topic: its text}

ASCII_PUNCTUATION = str.maketrans("\u201c\u201d\u2018\u2019\u2013\u2014", "\"\"''--")
LIST_ITEM = r"(?:[*+-]|\d+[.)]|\(\d+\))\s+"
PARAGRAPH_BREAK = re.compile(rf"\n\s*\n|\n\s*(?={LIST_ITEM})")
# Each of these marks a name or a phrase: :func:`x`, ``x``, `x' or `x`, *x* or **x**, "x" or 'x'.
MARKUP = [
    re.compile(r":[a-z:]+:`~?(?P<text>[^`]+)`"),
    re.compile(r"``(?P<text>[^`]+)``"),
    re.compile(r"`(?P<text>[^`']+)[`']"),
    re.compile(r"(?<![\w*])(\*\*?)(?P<text>\w[^*]*)\1(?![\w*])"),
    re.compile(r"(?<!\w)([\"'])(?P<text>[\w.]+(\(\))?)\1(?!\w)"),
]
# The last sentence of a paragraph if it announces a list or an example; it is left out.
LEAD_IN = re.compile(r"(?<=[.!?]) [^.!?]*:$")
# In wrapped text only the last line of a paragraph, or of a sentence, is this short.
SHORT_LINE = re.compile(r"^.{,28}[^.!?\n]\n", re.M)
SENTENCES = re.compile(r"[(\"']*[A-Z].*[.!?][)\"']*")
WORD = re.compile(r"[(\"']*[A-Za-z]+([/'-][A-Za-z]+)*[)\"'.,;:!?]*")
# Code, tables, grammars, accents, addresses, lists of PEPs, histories of versions, and licences.
NOT_PROSE = re.compile(
    r">>>|::|->|[^ -~]|[{}\\<>=@|]|https?:|Copyright|([A-Z]{2,} ){3}"
    r"|^PEP \d+ -|^(New|Changed|Added|Deprecated) in version"
)


def find_prose(text: str) -> list[str]:
    """The paragraphs of a docstring that are prose, each on one line and without markup.

    That leaves less text, but text that is easier for a small model: of the words that the demo's
    model samples (at temperature 0.8), 3 % do not occur in its training text.  With all of the
    docstrings and topics it was 7 %.
    """
    found = []
    for paragraph in PARAGRAPH_BREAK.split(inspect.cleandoc(text).translate(ASCII_PUNCTUATION)):
        wrapped = "\n".join(line.strip() for line in paragraph.strip().splitlines())
        line = LEAD_IN.sub("", re.sub(f"^{LIST_ITEM}", "", " ".join(wrapped.split())))
        for pattern in MARKUP:
            line = pattern.sub(r"\g<text>", line)
        words = line.split()
        n_plain = sum(WORD.fullmatch(word) is not None for word in words)
        if (
            len(words) >= 5
            and n_plain >= 0.9 * len(words)
            and SENTENCES.fullmatch(line)
            and not SHORT_LINE.search(wrapped)
            and not NOT_PROSE.search(line)
            and line.count("(") == line.count(")")
            and line.count('"') % 2 == 0
        ):
            found.append(line)
    return found


def read_documentation(name: str, path: Path) -> dict[str, str]:
    """{name of a document: text} of a Python file: its docstrings of at least 80 characters.

    A document is a class with its methods, a function, the docstring of the module, or a topic.
    The file is parsed, not imported.
    """
    tree = ast.parse(path.read_bytes())
    if name == TOPICS:
        topics = next(node for node in ast.walk(tree) if isinstance(node, ast.Dict))
        return {f"{name}:{topic}": text for topic, text in ast.literal_eval(topics).items()}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # {document: the nodes whose docstrings it has}
    nodes = {name: [tree]} | {f"{name}:{x.lineno}": ast.walk(x) for x in tree.body}
    documents = {}
    for document, described in nodes.items():
        texts = [ast.get_docstring(x) or "" for x in described if isinstance(x, kinds)]
        documents[document] = "\n\n".join(text for text in texts if len(text) >= 80)
    return documents


def prose_documents(files: list[File]) -> list[tuple[str, bytes]]:
    """The documents that have prose, in the order of the files.

    A paragraph that is repeated, as in subclasses and in topics, is kept only the first time.
    """
    documents, seen = [], set()
    for file in files:
        if file.name.startswith(WITHOUT_PROSE):
            continue
        for name, text in read_documentation(file.name, Path(file.source)).items():
            paragraphs = [x for x in dict.fromkeys(find_prose(text)) if x not in seen]
            seen.update(paragraphs)
            if paragraphs:
                documents.append((name, "\n\n".join(paragraphs).encode()))
    return documents
