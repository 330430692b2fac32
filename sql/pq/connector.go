// Package inboxpq lets the inbox on lib/pq begin and claim in one round trip.
package inboxpq

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/lib/pq"

	"github.com/devmappa/watermill-inbox/internal/sqlpool"
)

// NewConnector wraps lib/pq's connector, so that a transaction of the inbox begins and claims in one round
// trip instead of two: the inbox then costs no round trip more than the handler's own transaction.
//
//	connector, err := pq.NewConnector(url)
//	// ...
//	fused, err := inboxpq.NewConnector(connector)
//	// ...
//	db := sql.OpenDB(fused)
//
// An inboxsql.Repository on such a pool notices by itself. All else on the pool goes to lib/pq unchanged; the
// handler gets an ordinary *sql.Tx. Statements in any transaction end with the context of BeginTx, COPY among them, as with
// lib/pq, and with their own.
//
// Lib/pq waits for the answer to a statement also after its context has ended, for ever if there is none. Here the
// connection is closed when a statement still runs five seconds later. On a dead network a rollback of the inbox takes
// ten seconds. A commit has no context, lib/pq ignores it while it connects, and a write of which the network takes
// no part cannot be interrupted: the example's dialer and connect_timeout bound those.
//
// It returns an error for another driver's connector. A connector of lib/pq that was given a notice or
// notification handler can be wrapped; functions of lib/pq that take a driver.Conn need the one inside.
func NewConnector(connector driver.Connector) (driver.Connector, error) {
	if connector == nil {
		return nil, errors.New("inboxpq: connector is nil")
	}
	if _, ok := connector.Driver().(*pq.Driver); !ok {
		return nil, fmt.Errorf("inboxpq: the connector is not lib/pq's, its driver is %T", connector.Driver())
	}
	return &fusedConnector{connector}, nil
}

type fusedConnector struct{ driver.Connector }

// fusedDriver tells the repository what the pool can do.
type fusedDriver struct{ driver.Driver }

var _ sqlpool.FusingDriver = fusedDriver{}

// Fuses implements [sqlpool.FusingDriver].
func (fusedDriver) Fuses() {}

func (c *fusedConnector) Driver() driver.Driver { return fusedDriver{c.Connector.Driver()} }

func (c *fusedConnector) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	full, ok := inner.(pqConn)
	if !ok {
		_ = inner.Close()
		return nil, fmt.Errorf("inboxpq: a connection of this version of lib/pq lacks an interface: %T", inner)
	}
	return &fusedConn{pqConn: full}, nil
}

// pqConn is what a connection of lib/pq can do. It is its own transaction.
type pqConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.NamedValueChecker
	driver.Pinger
	driver.SessionResetter
	driver.Validator
	driver.Tx
}

// fusedConn's transactions that begin with a claim are begun and ended by text. Lib/pq's own methods end one with what
// watches the context of the transaction before, which panics in lib/pq or takes the old context's end for the new one's.
type fusedConn struct {
	pqConn
	unfit bool // in the middle of a transaction that is not ours, or closed soon: not to be used again
	idle  bool // a transaction has ended, and nothing else has happened since

	copying *copyStmt // a COPY that is not closed
}

// copyStmt is a COPY. While it is open a goroutine of lib/pq reads from the connection, and nobody else may.
type copyStmt struct {
	driver.Stmt
	conn *fusedConn
}

// Exec ends the COPY when it has no arguments.
func (s *copyStmt) Exec(args []driver.Value) (driver.Result, error) {
	//lint:ignore SA1019 a COPY of lib/pq has no other
	result, err := s.Stmt.Exec(args)
	if len(args) == 0 {
		s.conn.copying = nil
	}
	return result, err
}

func (s *copyStmt) Close() error {
	s.conn.copying = nil
	return s.Stmt.Close()
}

// BeginTx begins with the statement that it finds in the context.
func (c *fusedConn) BeginTx(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	idle, release := c.idle, c.bound(ctx)
	fused, ok := sqlpool.FusedFrom(ctx)
	if !ok {
		tx, err := c.pqConn.BeginTx(ctx, options)
		if err != nil {
			release()
			return nil, err
		}
		return &othersTx{tx, c, release}, nil
	}
	tx, err := c.begin(ctx, options, fused, idle)
	if err != nil {
		release()
		return nil, err
	}
	tx.release = release
	return tx, nil
}

// begin sends BEGIN by a query, because lib/pq watches a query's context until its rows are closed: here until the
// transaction ends, as it does with its own transactions, whatever runs in them.
func (c *fusedConn) begin(ctx context.Context, options driver.TxOptions, fused *sqlpool.Fused, idle bool) (*fusedTx, error) {
	begin, err := beginStatement(options)
	if err != nil {
		return nil, err
	}
	fused.Affected = 0 // database/sql tries again after ErrBadConn
	statement := fused.Guarded
	if idle {
		statement = fused.Plain
	}
	answer, err := c.run(ctx, begin+"; "+statement)
	if err != nil {
		return nil, c.failedBegin(err)
	}
	if fused.Affected, err = answer.Result().RowsAffected(); err != nil {
		_ = answer.Close()
		return nil, c.failedBegin(err)
	}
	return &fusedTx{conn: c, fused: fused, watch: answer}, nil
}

// Begin is for who uses the connection behind database/sql's back.
func (c *fusedConn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// answer is what lib/pq has read in answer to statements without rows.
type answer interface {
	driver.Rows
	Result() driver.Result // of the last statement
	Tag() string
}

// run runs statements that return no rows. Lib/pq watches the context until the answer is closed.
func (c *fusedConn) run(ctx context.Context, statements string) (answer, error) {
	rows, err := c.pqConn.QueryContext(ctx, statements, nil)
	if err != nil {
		return nil, err
	}
	full, ok := rows.(answer)
	if !ok {
		c.unfit = true
		_ = rows.Close()
		return nil, fmt.Errorf("inboxpq: rows of this version of lib/pq lack an interface: %T", rows)
	}
	return full, nil
}

// rollback leaves the connection without a transaction, or marks it for the pool to close. It has no context, and on a
// dead network closes the connection.
func (c *fusedConn) rollback() error {
	timer := time.AfterFunc(closeAfter, func() { _ = c.pqConn.Close() })
	_, err := c.run(context.Background(), "ROLLBACK")
	if !timer.Stop() || err != nil {
		c.unfit = true
	}
	return err
}

func (c *fusedConn) failedBegin(err error) error {
	var serverErr *pq.Error
	if errors.As(err, &serverErr) && serverErr.SQLState() == stateInTransaction {
		c.unfit = true
		return fmt.Errorf("inboxpq: somebody has left the connection in a transaction: %w", err)
	}
	_ = c.rollback() // the error says more
	return err
}

// stateInTransaction is what the claim fails with in a transaction that is older than itself, see
// dialect.PostgreSQL.BeginClaim: division by zero.
const stateInTransaction = "22012"

// IsValid and ResetSession keep an unfit connection out of the pool.
func (c *fusedConn) IsValid() bool { return !c.unfit && c.pqConn.IsValid() }

func (c *fusedConn) ResetSession(ctx context.Context) error {
	if c.unfit {
		return driver.ErrBadConn
	}
	return c.pqConn.ResetSession(ctx)
}

func (c *fusedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	defer c.bound(ctx)()
	return c.pqConn.ExecContext(ctx, query, args)
}

func (c *fusedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	release := c.bound(ctx)
	rows, err := c.pqConn.QueryContext(ctx, query, args)
	return releaseLater(release, rows, err)
}

func (c *fusedConn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

func (c *fusedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	defer c.bound(ctx)()
	inner, err := c.pqConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	full, ok := inner.(pqStmt)
	if !ok {
		c.copying = &copyStmt{inner, c} // which takes no contexts; it ends with the transaction's
		return c.copying, nil
	}
	return &fusedStmt{pqStmt: full, conn: c}, nil
}

// closeAfter is how long after the end of its context something may still run.
const closeAfter = 5 * time.Second

// bound closes the connection when what runs under the context outlives it. Lib/pq has then asked the server to cancel
// it, through a connection of its own, and waits for the answer, which never comes on a dead network. Its Close may be
// called meanwhile, and closes the socket. Every statement passes through here.
func (c *fusedConn) bound(ctx context.Context) (release func()) {
	c.idle = false
	if ctx.Done() == nil {
		return func() {}
	}
	var released atomic.Bool
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(closeAfter, func() {
			if !released.Load() {
				_ = c.pqConn.Close()
			}
		})
	})
	return func() {
		released.Store(true)
		if !stop() {
			c.unfit = true // it may be closed just now
		}
	}
}

// releaseLater keeps what bounds a query for its rows.
func releaseLater(release func(), rows driver.Rows, err error) (driver.Rows, error) {
	if full, ok := rows.(pqRows); ok && err == nil {
		return &fusedRows{full, release}, nil
	}
	release()
	return rows, err
}

// pqRows is what rows of lib/pq can do.
type pqRows interface {
	driver.RowsNextResultSet
	driver.RowsColumnTypeScanType
	driver.RowsColumnTypeDatabaseTypeName
	driver.RowsColumnTypeLength
	driver.RowsColumnTypePrecisionScale
}

type fusedRows struct {
	pqRows
	release func()
}

func (r *fusedRows) Close() error {
	defer r.release()
	return r.pqRows.Close()
}

type pqStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type fusedStmt struct {
	pqStmt
	conn *fusedConn
}

func (s *fusedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	defer s.conn.bound(ctx)()
	return s.pqStmt.ExecContext(ctx, args)
}

func (s *fusedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	release := s.conn.bound(ctx)
	rows, err := s.pqStmt.QueryContext(ctx, args)
	return releaseLater(release, rows, err)
}

// othersTx is a transaction without a claim, which is lib/pq's.
type othersTx struct {
	driver.Tx
	conn    *fusedConn
	release func()
}

func (t *othersTx) Commit() error { return t.end(t.Tx.Commit) }

func (t *othersTx) Rollback() error { return t.end(t.Tx.Rollback) }

func (t *othersTx) end(how func() error) error {
	defer t.release()
	err := how()
	t.conn.idle = err == nil
	return err
}

// fusedTx is a transaction that began with a claim.
type fusedTx struct {
	conn    *fusedConn
	fused   *sqlpool.Fused
	watch   driver.Rows // lib/pq ends the transaction with its context until they are closed
	release func()
}

// Commit proves and commits in one message. When the proof fails the server goes no further.
func (t *fusedTx) Commit() error {
	copying := t.conn.copying != nil
	return t.end(func() error {
		if copying {
			_ = t.conn.rollback()
			return sqlpool.ErrCopyOpen
		}
		commit := "COMMIT"
		if t.fused.Proof != "" {
			commit = t.fused.Proof + "; " + commit
		}
		answer, err := t.conn.run(context.Background(), commit)
		if err != nil {
			_ = t.conn.rollback() // the error says more
			return err
		}
		if answer.Tag() != "COMMIT" {
			return pq.ErrInFailedTransaction
		}
		return nil
	})
}

func (t *fusedTx) Rollback() error { return t.end(t.conn.rollback) }

func (t *fusedTx) end(how func() error) error {
	if t.conn.copying != nil {
		_ = t.conn.copying.Close() // what follows says more
	}
	_ = t.watch.Close()
	t.release()
	err := how()
	t.conn.idle = err == nil
	return err
}

// beginStatement is lib/pq's.
func beginStatement(options driver.TxOptions) (string, error) {
	begin := "BEGIN"
	switch isolation := sql.IsolationLevel(options.Isolation); isolation {
	case sql.LevelDefault:
	case sql.LevelReadUncommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
		begin += " ISOLATION LEVEL " + isolation.String()
	default:
		return "", fmt.Errorf("inboxpq: isolation level not supported: %s", isolation)
	}
	if options.ReadOnly {
		return "", errors.New("inboxpq: a claim is a write")
	}
	return begin + " READ WRITE", nil
}
