package sqlpool

import (
	"context"
	"database/sql/driver"
)

// FusingDriver is the driver of a connector whose BeginTx sends the first statement that it finds in its context in
// one message with BEGIN.
type FusingDriver interface {
	driver.Driver
	FusesFirstStatement()
}

// FirstStatement travels in BeginTx's context, there and back.
type FirstStatement struct {
	Guarded  string // for a connection that may be in a transaction, in which it fails
	Plain    string // for one that is not, which is less work for the server
	Affected int64  // the connector's answer
}

type firstStatementContextKey struct{}

// FirstStatementFrom returns what BeginTx is to send with BEGIN, if anything.
func FirstStatementFrom(ctx context.Context) (*FirstStatement, bool) {
	first, ok := ctx.Value(firstStatementContextKey{}).(*FirstStatement)
	return first, ok
}
