package inbox

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/devmappa/watermill-inbox/internal/sqliteerr"
)

// Errors of the middleware's own steps match one of these or wrap the repository's error. All of them
// reach the router, which nacks: nothing was stored, and the broker keeps the message.
var (
	// ErrInvalidKey: the consumer name or the message id is empty, too long, contains NUL or is not
	// UTF-8. Permanent; no SQL was sent.
	ErrInvalidKey = errors.New("invalid key")

	// ErrInFlight: the claim was not obtained within [Options.ClaimTimeout]. Another copy is being
	// handled, or no connection was free. Transient.
	ErrInFlight = errors.New("claim not obtained within the claim timeout: another copy of the message may be in flight, or no connection was free")

	// ErrNoRecord: the database inserted no row and shows no record either: a trigger, a rule or a
	// partition swallows claims. Never taken for a duplicate. Transient.
	ErrNoRecord = errors.New("the claim inserted no row and no record is seen for the key")

	// ErrTransactionBroken: the handler made the commit impossible. It went on after a failed statement,
	// ended the transaction itself, or left a deferred constraint violated. Permanent if it ended the transaction,
	// whatever the handler returned: a part of its work may be committed, and the error says whether the claim is.
	ErrTransactionBroken = errors.New("the handler broke its transaction")

	// ErrNoPublishTopic: the handler returned messages and the router has no publish topic for it.
	// Permanent; the transaction was rolled back.
	ErrNoPublishTopic = errors.New("the handler returned messages but has no publish topic")

	// ErrTooOld: the message is older than the retention, so its record may be deleted, and it is not known
	// whether it was processed. Permanent; the handler did not run.
	ErrTooOld = errors.New("the message is older than the retention, so it is not known whether it was processed")

	// ErrStoredMessages: the messages stored with the record cannot be sent again: a newer version of this
	// module stored them, the record is damaged, or the handler has no publish topic any more. Transient:
	// another instance may be able to.
	ErrStoredMessages = errors.New("cannot send the stored messages again")
)

// Error is an error of one of the middleware's own steps. A handler's error passes unchanged, except when
// the message's context ended while the handler ran, or the transaction could not be rolled back because
// its connection is lost: then it is wrapped here together with that.
type Error struct {
	// Step is one of "key", "claim", "replay", "handler", "outbox", "store" and "commit".
	Step string

	// Key is the message's key; in step "key" it is the one that was refused.
	Key Key

	// Err is the cause.
	Err error
}

// Error returns the step, the key and the cause.
func (e *Error) Error() string {
	return fmt.Sprintf("inbox: %s %s: %s", e.Step, e.Key, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

// Permanent marks a handler's error as one that no retry can cure: [ShouldRetry] is false and
// [ShouldPoison] is true for it. Errors.Is and errors.As see through the mark. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanentError{err}
}

func isPermanent(err error) bool {
	var permanent permanentError
	return errors.As(err, &permanent) || errors.Is(err, ErrInvalidKey) || errors.Is(err, ErrNoPublishTopic) || errors.Is(err, ErrTooOld)
}

// ShouldRetry fits the ShouldRetry field of Watermill's Retry middleware: true unless the error is
// permanent.
func ShouldRetry(params middleware.RetryParams) bool {
	return !isPermanent(params.Err)
}

// ShouldPoison fits Watermill's PoisonQueueWithFilter. It is true for permanent errors and for the handler's own, a time
// limit that the handler has set itself included. It is false for what is never the message's fault, so that an outage or
// a shutdown puts nothing into the poison queue. The package documentation has the table. An error that another
// middleware makes up during an outage, such as an open circuit breaker's, is not known here: combine this function with
// a test for it.
func ShouldPoison(err error) bool {
	if err == nil {
		return false
	}
	var own *Error
	ours := errors.As(err, &own)
	switch {
	case ours && errors.Is(err, context.Canceled):
		return false // even if permanent: a subscriber that is closing has nacked the message already
	case isPermanent(err):
		return true
	case isTransient(err), ours && errors.Is(err, context.DeadlineExceeded):
		return false
	}
	return !ours || own.Step == "outbox" && isRefusedValue(err) || errors.Is(err, ErrTransactionBroken)
}

// isTransient reports whether an error is about a cancelled context, a connection or the server's state. It relies on
// what the standard library and the drivers' errors share. It is narrow: a payload can make a handler meet a bad URL, a
// missing file or a truncated document.
func isTransient(err error) bool {
	for _, transient := range []error{context.Canceled, driver.ErrBadConn, net.ErrClosed} {
		if errors.Is(err, transient) {
			return true
		}
	}
	var (
		dnsErr     *net.DNSError
		addressErr *net.AddrError // a port that is none
		networkErr *net.OpError
		unsentErr  interface{ SafeToRetry() bool } // of pgx: the statement did not leave, the connection is dead
		stateErr   interface{ SQLState() string }  // of lib/pq and pgx
	)
	switch {
	case errors.As(err, &dnsErr):
		return !dnsErr.IsNotFound
	case errors.As(err, &addressErr):
		return false
	case errors.As(err, &networkErr):
		return true
	case errors.As(err, &unsentErr) && unsentErr.SafeToRetry():
		return true
	case errors.As(err, &stateErr):
		return slices.ContainsFunc(transientStates, func(class string) bool { return strings.HasPrefix(stateErr.SQLState(), class) })
	}
	code, ok := sqliteerr.Code(err)
	return ok && slices.Contains(transientCodes, code)
}

var (
	// Appendix A of the PostgreSQL manual: connection exception, transaction rollback, insufficient resources but not a
	// configured limit, shutdown, system and I/O error but not a file that is missing or there, idle-in-transaction and
	// transaction timeout, lock not available.
	transientStates = []string{"08", "40", "530", "531", "532", "533", "57P", "58000", "58030", "25P03", "25P04", "55P03"}

	transientCodes = []int{sqliteerr.Busy, sqliteerr.Locked, sqliteerr.IOErr, sqliteerr.Full}
)

// isRefusedValue reports whether a database refuses what a statement was given: a data exception, or an integrity
// constraint violation. Other errors of an outbox may be its table's.
func isRefusedValue(err error) bool {
	var stateErr interface{ SQLState() string }
	if errors.As(err, &stateErr) {
		return strings.HasPrefix(stateErr.SQLState(), "22") || strings.HasPrefix(stateErr.SQLState(), "23")
	}
	code, _ := sqliteerr.Code(err)
	return code == sqliteerr.Constraint
}

// isTimeLimit reports whether a handler's error is that of a time limit of its own, given that the message's context has
// not ended. With most drivers a statement's time limit costs the connection.
func isTimeLimit(err error) bool {
	var stateErr interface{ SQLState() string }
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &stateErr) && stateErr.SQLState() == "57014"
}

// CheckError says why a repository's table or server cannot be used as an inbox. Nothing is claimed and nothing is
// acknowledged until the faults are gone.
type CheckError struct {
	// Table is its name, quoted, with its schema if it was found.
	Table string

	// Problems are the faults, a sentence each.
	Problems []string
}

// Error lists the problems.
func (e *CheckError) Error() string {
	return fmt.Sprintf("inbox: table %s cannot be used as an inbox: %s", e.Table, strings.Join(e.Problems, "; "))
}
