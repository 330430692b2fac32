package model

import (
	"fmt"
	"strings"
)

// Property is what must hold, in every state or in every final one.
type Property struct {
	Name   string
	Always bool
	Holds  func(State) bool
}

// The properties that the library promises.
var (
	EffectOnce       = Property{"the effect happens exactly once, or not at all if the broker drops the message", false, func(s State) bool { return s.Effects == 1 || s.Effects == 0 && s.Dropped }}
	ClaimIffEffect   = Property{"there is a record exactly if there is an effect", false, func(s State) bool { return s.Claim == (s.Effects > 0) }}
	MessagePublished = Property{"with an effect the produced message is published, or the message is refused", false, func(s State) bool { return s.Effects == 0 || s.Published != 0 || s.Refused }}
	OneUUID          = Property{"the produced message has one UUID", false, func(s State) bool { return !s.OtherUUID }}
	AckedAfterCommit = Property{"nothing is acknowledged before the commit", true, func(s State) bool { return !s.AckedEarly }}
)

// Properties are all of them.
var Properties = []Property{EffectOnce, ClaimIffEffect, MessagePublished, OneUUID, AckedAfterCommit}

// Report is what an exploration has found.
type Report struct {
	States int
	Final  int               // in which nothing can move any more, unless by an accident
	Taken  map[string]int    // how often each step was taken
	Broken map[string]string // the shortest way to break a property, by the property's name
	Stuck  string            // the way to a final state with something left to do; empty: there is none
}

// reached is a state, and how it was reached first.
type reached struct {
	State
	from      int // the index of the one before
	who, text string
}

// Explore takes every step in every state that can be reached, breadth first, so that the ways it reports are
// the shortest.
func Explore(d Design, start State) Report {
	report := Report{Taken: map[string]int{}, Broken: map[string]string{}}
	all, seen := []reached{{State: start}}, map[State]bool{start: true}
	for i := 0; i < len(all); i++ {
		s, final := all[i].State, true
		for _, step := range steps {
			for p, who := range names {
				if step.outside && p > 0 {
					break
				} else if step.outside {
					who = "-"
				}
				for _, next := range step.take(d, s, p) {
					final = final && step.accident
					report.Taken[step.name]++
					if !seen[next.State] {
						seen[next.State] = true
						all = append(all, reached{next.State, i, who, next.Text})
					}
				}
			}
		}
		if final {
			report.Final++
			if report.Stuck == "" && !s.atRest() {
				report.Stuck = way(all, i)
			}
		}
		for _, property := range Properties {
			if (property.Always || final) && !property.Holds(s) && report.Broken[property.Name] == "" {
				report.Broken[property.Name] = way(all, i)
			}
		}
	}
	report.States = len(all)
	return report
}

// atRest reports whether the queue is empty and no process is busy.
func (s State) atRest() bool {
	for _, process := range s.Processes {
		if process.At != Idle {
			return false
		}
	}
	return s.Queue == 0
}

// way writes how a state was reached, a line per step.
func way(all []reached, i int) string {
	var steps []reached
	end := all[i].String()
	for ; i > 0; i = all[i].from {
		steps = append(steps, all[i])
	}
	var b strings.Builder
	for i := range steps {
		step := steps[len(steps)-1-i]
		fmt.Fprintf(&b, "%3d. %s %s\n", i+1, step.who, step.text)
	}
	return b.String() + "     = " + end
}

// String tells what somebody finds who looks at the broker and the database.
func (s State) String() string {
	return fmt.Sprintf("in the queue: %d, effects: %d, record: %t, stored and not marked: %t, published: %t",
		s.Queue, s.Effects, s.Claim, s.Stored != 0, s.Published != 0)
}
