/* A press on a column's name sorts by it; blanks stay at the end whichever way. */
document.querySelectorAll("thead button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, column = head.cellIndex, body = head.closest("table").tBodies[0];
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = (a, b) => {
    const x = key(a), y = key(b);
    if (x === "" || y === "") return (x === "") - (y === "");
    return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
  };
  [...body.rows].sort(compare).forEach(row => body.append(row));
  head.parentElement.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
}));
