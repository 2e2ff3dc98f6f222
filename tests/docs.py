"""Checks the documents: every relative link and its heading exists, every file of the source that the map or a design page
names exists, and pages keep their sizes."""
import os
import re
import subprocess
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
FILES = [f for f in subprocess.check_output(["git", "ls-files"], text=True).split("\n") if os.path.isfile(f)]
PAGES = [f for f in FILES if f.endswith(".md")]
# Most lines of a page.
LIMITS = {"README.md": 150, "ARCHITECTURE.md": 150, "docs/design/": 60}
faults = []


def headings(page):
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", open(page, encoding="utf-8").read(), re.M)
    return [re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines]


for page in PAGES:
    text = open(page, encoding="utf-8").read()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not os.path.exists(target):
            faults.append(f"{page}: {link} does not exist")
        elif anchor and anchor not in headings(target):
            faults.append(f"{page}: {link} has no such heading")
    for name, limit in LIMITS.items():
        n = text.count("\n")
        if page.startswith(name) and n > limit:
            faults.append(f"{page}: {n} lines, at most {limit}")
    if page.startswith(("docs/design/", "ARCHITECTURE.md")):
        for name in re.findall(r"`([\w./-]+(?:\.(?:rs|py|sh|metal|jsonl?|h|txt)|/))`", text):
            part = "/" + name.rstrip("/") + ("/" if name.endswith("/") else "")
            if not any(part in "/" + f if name.endswith("/") else ("/" + f).endswith(part) for f in FILES):
                faults.append(f"{page}: there is no {name}")

# The book has every page once.
listed = re.findall(r"\]\(([^)]+)\)", open("docs/SUMMARY.md", encoding="utf-8").read())
pages = [p.removeprefix("docs/") for p in PAGES if p.startswith("docs/") and p != "docs/SUMMARY.md"]
faults += [f"docs/SUMMARY.md: {page} is there {listed.count(page)} times" for page in pages if listed.count(page) != 1]

# Pages that the source names.
for file in FILES:
    if file.endswith((".rs", ".md", ".toml", ".sh", ".py", ".yaml", ".yml")):
        for name in re.findall(r"(?<![\w/.-])docs/[\w./-]+\.(?:md|yaml)", open(file, encoding="utf-8").read()):
            if not os.path.exists(name):
                faults.append(f"{file}: there is no {name}")

print("\n".join(faults) or f"{len(PAGES)} pages: links, names and sizes are right")
sys.exit(bool(faults))
