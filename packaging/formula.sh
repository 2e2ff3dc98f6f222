#!/usr/bin/env bash
# Writes the Homebrew formula of a release: `bash packaging/formula.sh 0.1.0 dist/SHA256SUMS`. It goes into the repository of a tap.
set -euo pipefail
version=$1
sums=$2
sum() {
    local found
    found=$(awk -v name="ruvllm-$version-$1.tar.gz" '$2 == name { print $1 }' "$sums")
    [ -n "$found" ] || { echo "$sums has no ruvllm-$version-$1.tar.gz" >&2; exit 1; }
    printf '      url "https://github.com/ruvnet/ruvllm/releases/download/v%s/ruvllm-%s-%s.tar.gz"\n      sha256 "%s"\n' \
        "$version" "$version" "$1" "$found"
}
mac_arm=$(sum aarch64-apple-darwin)
mac_intel=$(sum x86_64-apple-darwin)
linux_arm=$(sum aarch64-unknown-linux-musl)
linux_intel=$(sum x86_64-unknown-linux-musl)
cat <<RUBY
class Ruvllm < Formula
  desc "Runs large language models from GGUF files"
  homepage "https://github.com/ruvnet/ruvllm"
  version "$version"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    on_arm do
$mac_arm
    end
    on_intel do
$mac_intel
    end
  end

  on_linux do
    on_arm do
$linux_arm
    end
    on_intel do
$linux_intel
    end
  end

  def install
    bin.install "ruvllm"
    generate_completions_from_executable(bin/"ruvllm", "completions")
    system bin/"ruvllm", "man", "man"
    man1.install Dir["man/*.1"]
  end

  service do
    run [opt_bin/"ruvllm", "serve"]
    keep_alive true
  end

  test do
    assert_match "ruvllm #{version}", shell_output("#{bin}/ruvllm --version")
    assert_match "Ownership is", shell_output("#{bin}/ruvllm -p 'Ownership is' -n 8 --temp 0")
  end
end
RUBY
