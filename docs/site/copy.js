// Add a button to each block of code that copies its text, without the last line break, which would run a command.
addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.querySelector("pre").textContent.trimEnd());
        button.textContent = "Copied";
      } catch {
        button.textContent = "Not allowed"; // browsers refuse pages of plain HTTP
      }
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    code.append(button);
  }
});
