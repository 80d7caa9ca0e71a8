"use strict";
// Sorts tables by the buttons in their heads, and copies texts. Without it the page shows the same.
for (const button of document.querySelectorAll("button.sort")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.children[head.cellIndex]?.dataset.v;
    const order = (one, other) => {
      const a = key(one), b = key(other);
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      const numbers = a !== "" && b !== "" && !isNaN(a) && !isNaN(b);
      return (up ? 1 : -1) * (numbers ? a - b : a.localeCompare(b));
    };
    body.append(...[...body.rows].sort(order));
  });
}
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.from);
    getSelection().selectAllChildren(text);
    let done = false;
    try {
      await navigator.clipboard.writeText(text.textContent);
      done = true;
    } catch {
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
