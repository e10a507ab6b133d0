/* Tables of many rows get a box: rows that do not contain its words are hidden; "✗" hides the rows without a ✗. */
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const rows = [...table.tBodies[0].rows]
    const names = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.textContent.trim())
    if (rows.length < 25 || names.every((name) => !name)) continue
    const marks = rows.some((row) => row.textContent.includes("✗"))
    const box = document.createElement("div")
    box.className = "rows"
    box.innerHTML = `<label>Filter <input type="search" placeholder="${marks ? "llama, qwen, ✗" : "words"}"></label>`
    const count = document.createElement("output")
    box.append(count)
    const input = box.querySelector("input")
    const show = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean)
      let shown = 0
      for (const row of rows) {
        const text = row.textContent.toLowerCase()
        row.hidden = !words.every((word) => text.includes(word))
        shown += !row.hidden
      }
      count.textContent = `${shown} of ${rows.length} rows`
    }
    input.addEventListener("input", show)
    show()
    const place = table.closest(".md-typeset__scrollwrap") ?? table
    place.before(box)
  }
})
