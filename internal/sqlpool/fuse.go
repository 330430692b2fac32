package sqlpool

import (
	"context"
	"database/sql/driver"
	"errors"
)

// FusingDriver is the driver of a connector that looks for a [Fused] in the context of BeginTx.
type FusingDriver interface {
	driver.Driver
	Fuses()
}

// Fused is a transaction whose first statement travels with BEGIN and whose proof travels with COMMIT. It is passed in
// BeginTx's context, there and back, because *sql.Tx lets nothing else through.
type Fused struct {
	Guarded  string // the first statement, for a connection that may be in a transaction, in which it fails
	Plain    string // for one that is not, which is less work for the server
	Affected int64  // by the first statement: the connector's answer
	Proof    string // set before Commit; empty: none
}

type fusedContextKey struct{}

// FusedFrom returns what BeginTx is to send with BEGIN, if anything.
func FusedFrom(ctx context.Context) (*Fused, bool) {
	fused, ok := ctx.Value(fusedContextKey{}).(*Fused)
	return fused, ok
}

// ErrCopyOpen is a commit's error when the handler has left a COPY open. The transaction is rolled back.
var ErrCopyOpen = errors.New("a COPY is still open: close it on every way out")
