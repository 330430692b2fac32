//go:build !unix

// Command torture needs signals that this system does not have.
package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "torture: needs a Unix system")
	os.Exit(2)
}
