#!/usr/bin/env bash
# Print how many lines differ between mnist_ddp's files and those of its two ports: lines of both sides are counted.
CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
for app in mnist_horovod mnist_lightning; do
  for file in train.py distributed.py model.py data.py options.py; do
    one=apps/mnist_ddp/$file
    [ -f "$one" ] || one=core/samestep/torch/$file # mnist_ddp takes it from the package
    other=apps/$app/$file
    [ -f "$other" ] || continue
    echo "$app/$file: $(diff "$one" "$other" | grep -c '^[<>]') changed lines of $(wc -l <"$other")"
  done
done
