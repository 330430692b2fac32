//go:build !unix

package main

import (
	"context"
	"errors"
)

func drive(context.Context, options) error {
	return errors.New("the driver needs a unix system; the roles run everywhere, see -help")
}
