package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/sqliteerr"
)

// handlerFailure is what a reader of a build's output needs: what is wrong, what was seen, why, and what
// to do.
type handlerFailure struct {
	what  string
	facts []string
	advice
	last bool // the other faults would show nothing
}

type advice struct{ cause, fix string }

func (f *handlerFailure) Error() string {
	var text strings.Builder
	text.WriteString(f.what)
	for _, fact := range f.facts {
		text.WriteString("\n    " + strings.ReplaceAll(fact, "\n", "\n        "))
	}
	if f.cause != "" {
		text.WriteString("\n    likely cause: " + f.cause)
		text.WriteString("\n    fix: " + f.fix)
	}
	return text.String()
}

// The causes that TestHandler can name.
var (
	writesAround = advice{
		"the handler writes around its transaction: through the pool (*sql.DB, *pgxpool.Pool), through a store that holds the pool, or over another connection",
		"make every write through the transaction in the message's context: TxFromContext(msg.Context()) of the repository's package, inboxsql or inboxpgx",
	}
	commitsItself = advice{
		"the handler commits its transaction itself: the claim is committed with it, before the work is known to be done",
		"leave Commit and Rollback to the middleware: return nil or an error",
	}
	breaksTransaction = advice{
		"the handler ended its transaction itself (Commit, Rollback, or either as SQL text), went on after a failed statement, left rows open, left a goroutine behind that uses the transaction, or violated a deferred constraint",
		"return the error of every statement, close rows, wait for goroutines, and leave Commit and Rollback to the middleware",
	}
	replacesTransaction = advice{
		"the handler replaced its transaction by another one (ROLLBACK and BEGIN as SQL text), which took the claim away",
		"leave the transaction to the middleware; for a part that may fail use a savepoint",
	}
	leavesGoroutine = advice{
		"a goroutine that the handler left behind still writes after the handler has returned. Whether its work is committed, lost or written around the transaction is luck",
		"wait for every goroutine before returning; after that the transaction is the middleware's",
	}
	remembers = advice{
		"the handler's work depends on something that a rollback does not undo: a variable, a cache, a file, another database. Or State or Describe shows what no two attempts share: a time, a random id, a number from a sequence",
		"decide by the message and the database alone, and let State and Describe leave out what differs by nature",
	}
	ignoresErrors = advice{
		"the handler ignores errors of its statements. Where a failed statement does not end the transaction, as in SQLite, half of the work would be committed and the message acknowledged",
		"return the error of every statement",
	}
	answersItself = advice{
		"the handler calls msg.Ack() or msg.Nack(). After an Ack the broker forgets the message before anything is committed",
		"return nil or an error; the router answers after the commit",
	}
	sharesUUID = advice{
		"the handler gives messages of one run the same UUID, for example the incoming message's",
		"give each produced message a UUID of its own; consumers that deduplicate would drop all but one",
	}
	changesKey = advice{
		"Options.MessageID does not return the same id for each copy of a message",
		"take the id from what the producer has set: the UUID, or a metadata field",
	}
	isStuck = advice{
		"the handler waits for something and does not look at the message's context",
		"pass msg.Context() to everything that can wait",
	}
	notFresh = advice{
		"the constructor does not give the same fresh state each time, or State shows something else than the handler's work",
		"make a schema, a file or a table of its own for each call, or empty the tables",
	}
)

// stateFacts are the lines about the state.
func stateFacts(want, got string) []string {
	return []string{fmt.Sprintf("state expected: %q", want), fmt.Sprintf("state seen:     %q", got)}
}

// handlerStack is the part of a panic's stack between the panic and the kit.
func handlerStack(stack string) string {
	if _, after, found := strings.Cut(stack, "\npanic("); found {
		stack = "panic(" + after
	}
	before, _, _ := strings.Cut(stack, "\n"+kitFrames)
	return before
}

// kitFrames begins the lines of the stack that are the kit's own.
const kitFrames = "github.com/devmappa/watermill-inbox/inboxtest.(*"

// whyRefused says why a message was not acknowledged although nothing was done to it.
func whyRefused(err error) advice {
	var (
		own  *inbox.Error
		step string
	)
	if errors.As(err, &own) {
		step = own.Step
	}
	late := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, inbox.ErrInFlight)
	code, _ := sqliteerr.Code(err)
	locked := code == sqliteerr.Busy || code == sqliteerr.Locked
	switch {
	case errors.Is(err, inbox.ErrTransactionBroken), step == "commit":
		return breaksTransaction // some drivers say it in an error of their own
	case step == "key":
		return advice{
			"the message has no valid id, or the handler no valid consumer name",
			"give Handler.Message a UUID, or set Options.MessageID and Options.Consumer as in production",
		}
	case step == "claim" && (late || locked):
		return advice{
			"something else holds the lock or the pool's connections: a transaction or rows that the constructor or State have left open",
			"close rows and end transactions in both",
		}
	case step != "" && step != "handler":
		return advice{
			"the repository or the outbox failed: the server is away, or a table is missing",
			"look at the error; make the tables in the constructor",
		}
	case late || locked:
		return advice{
			writesAround.cause + ", or reads through a pool that has no connection left; so it waits in vain for the lock or the connection that its own transaction holds",
			writesAround.fix + ". If the handler is just slow, raise Handler.Timeout",
		}
	}
	return advice{
		"the handler refuses the message as it is. If the error speaks of a lock or a timeout: it writes around its transaction and waits for itself",
		"make the message and the state fit each other in the constructor. In the second case, " + writesAround.fix,
	}
}
