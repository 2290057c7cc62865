"""Print the list of attacks with what tries each."""

from tests.attacks.items import table, vectors

print("\n".join(table()))
print(f"{len(vectors())} vectors")
