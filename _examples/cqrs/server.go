//go:build unix

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

func startPostgreSQL(ctx context.Context, out io.Writer) (address string, stop func() error, err error) {
	set, err := servers.Ensure(ctx, servers.KindPostgreSQL)
	if err != nil {
		return "", nil, err
	}
	fmt.Fprintln(out, set.Servers[0])
	return set.Servers[0].Address, set.Close, nil
}
