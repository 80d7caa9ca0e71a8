"use strict";
// Sorts tables, copies texts, filters a leaderboard, and marks tables that are wider than the screen. The page works without it.
function mark() {
  for (const one of document.querySelectorAll(".scroll")) one.classList.toggle("more", one.scrollWidth > one.clientWidth + 1);
}
addEventListener("resize", mark);
document.addEventListener("change", mark);
document.addEventListener("toggle", mark, true);
mark();
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
const filters = [...document.querySelectorAll("select.filter")];
function filter() {
  let left = 0;
  for (const row of document.querySelectorAll("tr.entry")) {
    const places = row.dataset.f.split(" ");
    row.hidden = filters.some((one) => one.value !== "" && places[one.dataset.column] !== one.value);
    left += !row.hidden;
  }
  document.getElementById("count").textContent = left === 1 ? "1 entry" : `${left} entries`;
}
for (const one of filters) one.addEventListener("change", filter);
if (filters.length) filter();
