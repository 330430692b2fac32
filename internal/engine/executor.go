package engine

import (
	"context"
	"errors"

	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// Pool is a driver's connection pool. Its methods may be called by many goroutines. After an error of which
// dialect.CannotWrite is true, here or in a transaction, it closes the connection.
type Pool interface {
	Executor

	// Driver returns what the driver does by itself.
	Driver() Driver

	// Begin opens a message's transaction and runs its first statement, in one round trip if the driver can, and
	// returns the number of rows affected. After an error there is no transaction. The transaction does not outlive
	// the context.
	Begin(ctx context.Context, opening Opening) (Tx, int64, error)

	// BeginShort opens a transaction that is over soon, at the server's isolation level.
	BeginShort(ctx context.Context) (Tx, error)
}

// ErrConnectionLost is matched by an error of [Pool].Begin, or of a statement, after which the connection is gone, and
// the transaction with it. Pools that begin again by themselves need not say so.
var ErrConnectionLost = errors.New("the connection is lost")

// Executor runs statements on a pool or in a transaction.
type Executor interface {
	// Exec runs a statement, with the driver's own placeholders, and returns the number of rows affected.
	Exec(ctx context.Context, statement string, args ...any) (int64, error)

	// Query runs a query, scans each row into the destinations and calls the function for it.
	Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error
}

// Tx is an open transaction. Its methods are called by one goroutine.
type Tx interface {
	Executor

	// Commit returns nil only if the database has said that this transaction is committed. A driver that proves with
	// the commit runs the proof first, in the same round trip; it fails unless this transaction is still open.
	Commit(ctx context.Context, proof dialect.Query) error

	// Rollback leaves the connection fit for use or closes it. The second time, after Commit, and when the context of
	// Begin has ended, it does nothing. It returns an error when the connection is lost, and one of which IsEnded
	// is true when the transaction has ended before.
	Rollback() error

	// IsBroken reports whether an error of this transaction is the driver's word, rather than the server's, that
	// the transaction has failed, has ended or is in use. With a live context only the handler can have done that.
	IsBroken(err error) bool

	// IsEnded reports whether it is the driver's word that the transaction has ended.
	IsEnded(err error) bool
}

// Driver is what a driver does by itself.
type Driver struct {
	// NoticesEnd: Commit fails when the transaction was ended or failed before, also by a statement's text, as far as
	// the driver can tell from the state of its connection. No proof is asked for.
	NoticesEnd bool

	// ProvesWithCommit: the proof costs no round trip.
	ProvesWithCommit bool

	// Fuses: the first statement travels with BEGIN, on connections of which the driver does not know whether
	// somebody has left them in a transaction.
	Fuses bool

	// FreeParameters: Query sends the query's arguments, bytes as $1, in its one round trip.
	FreeParameters bool
}

// Opening is how a message's transaction begins.
type Opening struct {
	// First is the first statement.
	First dialect.Query

	// Guarded is what a driver that fuses sends instead on a connection that may already be in a transaction.
	Guarded dialect.Query
}
